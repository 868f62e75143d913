"""The driver of a job on Ray: `on_ray.py ADDRESS OWN_ADDRESS HOSTS ARGUMENTS...`."""

from __future__ import annotations

import sys

import ray

from outlast.launch.ray_cluster import run_on_ray

if __name__ == "__main__":
    address, own, hosts, *arguments = sys.argv[1:]
    least, most = map(int, hosts.split(":"))
    ray.init(address=address, _node_ip_address=own)
    sys.exit(run_on_ray(arguments, hosts=(least, most), resources={"CPU": 1}, timeout=60.0))
