"""Records to tables, model cards, curves and pages."""
