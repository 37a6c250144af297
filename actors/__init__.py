"""RUN: Ray actors, thin.  They carry messages and perform what ``elastic.control`` decided; they decide nothing."""
