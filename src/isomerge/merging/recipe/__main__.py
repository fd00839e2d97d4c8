"""`python -m isomerge.merging.recipe` writes schema.json anew."""

from isomerge.merging.recipe.schema import FILE, text

FILE.write_text(text(), encoding="utf-8")
print(f"wrote {FILE}")
