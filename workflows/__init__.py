"""Durable decisions only: runs, nodes, dead letters. Nothing here touches the world."""
