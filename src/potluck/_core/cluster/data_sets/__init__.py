"""The data sets of jobs: read where they lie, brought to the machines that train on them, kept
there within a quota.

| module | what it does |
|---|---|
| `scan` | the package of a folder, of which only what changed is read again |
| `sets` | what of other machines is kept here, and who may have what |
| `job_data` | the data sets of one job on this machine |
"""
