"""The commands of the CLI, one module each: what it takes (`add_arguments`) and what it does (`run`)."""
