"""The data sets of jobs: read where they lie, brought to the machines that train on them, kept
there within a quota.

| module | what it does |
|---|---|
| `scan` | the package of a folder, of which only what changed is read again |
| `outlines` | the bytes of shards that say how many samples they have |
| `sets` | what of other machines is kept here, and who may have what |
| `job_data` | the data sets of one job on this machine |
| `travel` | one of them on its way here, shard by shard; who waits for it |
"""
