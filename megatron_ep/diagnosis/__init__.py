"""What went wrong and who is to blame: `failures.py` keeps the failures nobody was told of, `blame.py` finds the rank
that never came, `env.py` reports on the machine. Imports the standard library only.
"""
