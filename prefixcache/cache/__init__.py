"""The one object that the scheduler talks to about K/V."""
