"""All private names of torch that Lowtide relies on, one module per subject.

`tests/_torch/test_private_names.py` specifies the behaviour of each. Each was read in the sources of torch 2.13; a
version after "present since" is the first one that has it, if that is known.
"""
