"""The store protocol (`store`), and stores: in memory (`memory_store`), torch's (`torch_store`)."""
