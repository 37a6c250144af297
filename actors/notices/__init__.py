"""The sources of preemption notices, which say that a node's machine will be taken away, and when.

Each is one module here, with a class that has the methods of :class:`actors.notices.port.NoticeSource`, and a
row of :data:`actors.notices.known_sources.SOURCES`.  The keeper of a node opens the sources of the job, and
watches each on a thread of its own (:mod:`actors.notices.watch`).  A source only gives notice; the coordinator
decides.
"""
