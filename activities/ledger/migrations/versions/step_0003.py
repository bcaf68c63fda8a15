"""Takes step 0003."""

from alembic import op

from activities.ledger.migrations import statements

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Takes the step."""
    for statement in statements(revision):
        op.get_bind().exec_driver_sql(statement)
