"""Experts that are the feed-forwards of dense models: mixtures built of them, made smaller, and made dense again."""
