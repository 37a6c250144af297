"""Objects: bytes under a key, in a folder, in memory or in a bucket.  :mod:`storage.objects.port` says what
every store promises.
"""

from storage.objects.port import PARTIAL, Data, ObjectStore, Piece, Sized, pieces_of

__all__ = ["PARTIAL", "Data", "ObjectStore", "Piece", "Sized", "pieces_of"]
