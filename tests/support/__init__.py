"""What the tests of every level share: tiny random models, and an oracle that has no cache."""
