"""What runs on a GPU: `make gpu`."""
