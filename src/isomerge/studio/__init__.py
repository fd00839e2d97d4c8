"""A local web page to work in: it chooses, checks, plans and shows, and what it runs are command lines of isomerge."""
