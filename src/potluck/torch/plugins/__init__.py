"""Thin plug-ins for frameworks that do not let a backend of another name through.

``accelerate`` and ``transformers`` insist on gloo or mpi for CPUs, but take a process group that is
there already. Lightning needs none: ``DDPStrategy(process_group_backend="potluck")``.
"""
