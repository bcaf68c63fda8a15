"""How Alembic takes the steps: on the connection that it is given, within the transaction that it is in.

See "Sharing a Connection across one or more programmatic migration commands" in Alembic's cookbook.
"""

from alembic import context

context.configure(connection=context.config.attributes["connection"], version_table="redrive_version")
context.run_migrations()
