"""All private names of torch that Lowtide relies on, one module a subject.

`tests/_torch/test_private_names.py` says what each must do. Each was read in the sources of torch 2.13; those marked so
have been there since 2.10 or longer.
"""
