"""The options of `outlast run`, and the checked job specification made from them."""
