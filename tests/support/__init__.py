"""The tests' harness: hosts in network namespaces, clusters, proxies, a simulator, figures.

Not part of the package. ``tools/environment`` (by a file in .venv) and pytest (``pythonpath``) put
``tests`` on the path; tests, benchmarks, ``make soak``, ``make demo-cluster`` import ``support``.
"""
