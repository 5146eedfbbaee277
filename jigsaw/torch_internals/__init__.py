"""Every private name of torch that jigsaw uses, each once: its purpose, and the reason that no public name will do.

Other rooms import from here, and name nothing private of torch themselves
(`tests/torch_internals/test_torch_internals.py`).  A name that this torch lacks raises `TorchVersionError`, which says
which versions have it.
"""
