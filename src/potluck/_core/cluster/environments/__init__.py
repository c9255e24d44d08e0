"""The packages of a script, the same on every machine: what it needs (``sources``), which wheels
that is for each kind of machine (``plan``, ``planning``), and the environment made of them
(``making``).

The machine that starts a job decides, and signs; the others select their part, and verify. uv
resolves and installs: there is no resolver here.
"""
