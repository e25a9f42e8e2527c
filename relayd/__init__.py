"""relayd: a WebSocket relay daemon for Strata RFC-0004 on PostgreSQL."""
