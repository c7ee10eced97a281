"""One file per provider; `base.py` says what a provider is."""
