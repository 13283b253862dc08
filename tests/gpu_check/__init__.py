"""``make gpu-check``: proves on a machine with GPUs what tests without one can't.

``tools/gpu_bundle`` makes, on a machine with a package registry, a folder of what the check needs
beside torch. ``build`` makes an environment and the extension from it, without a network.
``catalogue`` lists the steps; ``runner`` runs each in a process of its own, within a limit of time,
and writes its result; ``report`` makes one page of the results.
"""
