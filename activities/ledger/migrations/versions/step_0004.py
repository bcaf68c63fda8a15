"""Takes step 0004."""

from alembic import op

from activities.ledger.migrations import statements

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Takes the step."""
    for statement in statements(revision):
        op.get_bind().exec_driver_sql(statement)
