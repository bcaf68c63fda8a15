"""Takes step 0001."""

from alembic import op

from activities.ledger.migrations import statements

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Takes the step."""
    for statement in statements(revision):
        op.get_bind().exec_driver_sql(statement)
