"""The options of `outlast run`, and the checked job that is made of them."""
