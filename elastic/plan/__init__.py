"""CHOOSES the layout, the seat of each member, the microbatches that it runs and the source of each slice.
Pure: standard library only.
"""
