"""The writer process, whose modules do not import torch, and the main process's side of it."""
