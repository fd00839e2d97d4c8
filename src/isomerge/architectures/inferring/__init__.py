"""What can be found out about an architecture by running its stock class, tiny and with random weights."""
