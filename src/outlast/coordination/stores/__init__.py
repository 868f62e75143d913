"""The store protocol, and stores: in memory (`store`), torch's (`torch_store`), and on etcd."""
