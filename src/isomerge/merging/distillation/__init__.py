"""Distillation: a student is drawn towards the predictions of its teachers, step by step, without labels."""
