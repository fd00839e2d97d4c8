"""`python -m isomerge.merge.recipe` writes schema.json anew."""

from isomerge.merge.recipe.schema import FILE, text

FILE.write_text(text(), encoding="utf-8")
print(f"wrote {FILE}")
