"""What is done to memory: where a plan's chunks lie (``layout``), how they are combined
(``kernels``, ``reduction``) and encoded (``coding``).
"""
