"""A cluster of Ray with three nodes on this machine, which takes orders: ``remove``, ``add``."""

import sys

from ray.cluster_utils import Cluster

NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}
cluster = Cluster(
    initialize_head=True, head_node_args=NODE | {"num_cpus": 0, "include_dashboard": False}
)
nodes = [cluster.add_node(**NODE) for _ in range(3)]
print(f"cluster at {cluster.address}", flush=True)
for line in sys.stdin:
    if line.strip() == "remove":
        cluster.remove_node(nodes.pop(), allow_graceful=False)
        print("removed", flush=True)
    else:
        nodes.append(cluster.add_node(**NODE))
        print("added", flush=True)
cluster.shutdown()
