"""The fabrics that carry bytes between ranks: the requirements of each, and how it connects ranks."""
