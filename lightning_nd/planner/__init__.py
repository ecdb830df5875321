"""Which layout fits, how fast it is and why: closed forms, a search over them, and one rank simulated.

What needs a model (`ask`, `facts`, `simulate`) builds it on meta; everything else is arithmetic on its numbers.
"""
