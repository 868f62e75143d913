"""The simulation of the store on etcd: a model of etcd, a schedule of faults, and the checks."""
