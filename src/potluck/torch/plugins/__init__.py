"""Plug-ins for frameworks that refuse unknown names of backends.

``accelerate`` and ``transformers`` accept only gloo or mpi on CPUs, but use a process group that
exists. Lightning needs no plug-in: ``DDPStrategy(process_group_backend="potluck")``.
"""
