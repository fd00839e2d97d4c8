"""The demo: small models trained on the spot on real data, aligned, averaged and measured."""
