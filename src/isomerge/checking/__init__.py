"""What are these models to each other, and how should they be merged? In seconds, from headers and samples."""
