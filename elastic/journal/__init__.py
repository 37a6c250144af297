"""The form of the journal: events, decisions and the run as JSON, small and exact."""
