"""How bytes reach other ranks: what each fabric needs here, and how it connects them."""
