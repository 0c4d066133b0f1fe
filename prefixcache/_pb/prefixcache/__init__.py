"""Generated from `protos/`; `make proto` writes it, nobody edits it."""
