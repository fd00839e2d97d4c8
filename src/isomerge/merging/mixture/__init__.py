"""A mixture of experts made of models that were trained apart: each keeps its feed-forwards, and a router chooses."""
