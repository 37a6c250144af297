"""The protocol: the messages between coordinator, workers and keepers, and the rules of each side.  Pure,
standard library only.
"""
