//! `query_sql`: one statement on an SQLite database of the workspace.
//!
//! SQLite opens no file. It works on a copy of the database in memory, and a change replaces the whole file.

use std::time::Instant;

use rusqlite::config::DbConfig;
use rusqlite::hooks::{AuthAction, AuthContext, Authorization};
use rusqlite::limits::Limit;
use rusqlite::types::{ToSqlOutput, ValueRef};
use rusqlite::{Connection, MAIN_DB, Statement, ToSql, ffi, params_from_iter};
use serde_json::{Value, json};

use super::{Args, Output, VerbError, failed};
use crate::tool::primitives::sql::{ERROR, FIRST_PARAMETER, WRITE};
use crate::tool::shell::path::{Access, WorkspacePath};
use crate::tool::shell::workspace::Workspace;

/// Maximum size of a database, in bytes.
const MAX_DATABASE: usize = 64 << 20;
/// Maximum size of all rows as JSON, in bytes: a model gets 50,000 characters of them.
const MAX_ROWS: usize = 48_000;
/// Maximum size of a statement, in bytes.
const MAX_STATEMENT: i32 = 64 << 10;
/// Maximum size of a value, in bytes.
const MAX_VALUE: i32 = 16 << 20;
/// Maximum memory of SQLite, in bytes.
const MAX_HEAP: i64 = 512 << 20;
/// The number of steps of SQLite's virtual machine between two looks at the time.
const STEPS: i32 = 10_000;
/// The first bytes of a database, and the places of its versions for writing and reading (SQLite's file format, §1.3).
const MAGIC: &[u8] = b"SQLite format 3\0";
const VERSIONS: std::ops::Range<usize> = 18..20;
const WITH_WAL: &[u8] = &[2, 2];
const WITHOUT_WAL: &[u8] = &[1, 1];
/// Files beside a database, which hold a part of its content.
const COMPANIONS: [&str; 2] = ["-wal", "-journal"];
/// Files beside a database that a program has open. It would go on with a log that does not belong to a database that is replaced.
const OF_OPEN: [&str; 2] = ["-wal", "-shm"];
const NOT_PERMITTED: &str = "the statement is not permitted: it may read, and change tables only where the pack has allow_sql_writes; \
    attached databases, transactions, extensions and most pragmas are off";
/// Pragmas that only read, and take at most a name.
const PRAGMAS: [&str; 10] = [
    // FTS5 asks for it.
    "data_version",
    "encoding",
    "foreign_key_list",
    "index_info",
    "index_list",
    "index_xinfo",
    "table_info",
    "table_list",
    "table_xinfo",
    "user_version",
];

/// A parameter of a statement: a letter for its type, and its text.
struct Parameter<'a>(&'a str);

impl ToSql for Parameter<'_> {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        let wrong = |error: std::num::ParseIntError| rusqlite::Error::ToSqlConversionFailure(error.into());
        let not_real = |error: std::num::ParseFloatError| rusqlite::Error::ToSqlConversionFailure(error.into());
        let value = match self.0.split_at_checked(1).unwrap_or_default() {
            ("i", text) => ValueRef::Integer(text.parse().map_err(wrong)?),
            ("f", text) => ValueRef::Real(text.parse().map_err(not_real)?),
            ("t", text) => ValueRef::Text(text.as_bytes()),
            _ => ValueRef::Null,
        };
        Ok(ToSqlOutput::Borrowed(value))
    }
}

/// Runs a statement. The arguments are the path, the statement, the mode and the parameters.
pub(super) fn run(verb: &str, args: Args<'_>, workspace: &Workspace) -> Option<Output> {
    (verb == "query_sql").then(|| match args.text(2) {
        WRITE if changes_something(args, workspace)? => workspace.locked(|| query(args, workspace, true)),
        _ => query(args, workspace, false),
    })
}

/// Returns whether a statement changes something. Those that do exclude each other.
fn changes_something(args: Args<'_>, workspace: &Workspace) -> Result<bool, VerbError> {
    let connection = open(&args.path(0, Access::Read)?, workspace, true)?.0;
    let statement = connection.prepare(args.text(1)).map_err(|error| sql_error(&error, workspace))?;
    Ok(!statement.readonly() && statement.is_explain() == 0)
}

fn query(args: Args<'_>, workspace: &Workspace, is_write: bool) -> Output {
    let path = args.path(0, if is_write { Access::Write } else { Access::Read })?;
    if is_write {
        check_replaceable(&path, workspace)?;
    }
    let (mut connection, has_wal) = open(&path, workspace, is_write)?;
    let error = |error: rusqlite::Error| sql_error(&error, workspace);
    let output = {
        let mut statement = connection.prepare(args.text(1)).map_err(error)?;
        if !is_write && !statement.readonly() && statement.is_explain() == 0 {
            return Err(VerbError::Denied(NOT_PERMITTED.to_owned()));
        }
        let given = args.0.get(FIRST_PARAMETER..).unwrap_or_default();
        if statement.parameter_count() != given.len() {
            return failed(format!(
                "the statement has {} parameters, and {} values are given",
                statement.parameter_count(),
                given.len()
            ));
        }
        let columns: Vec<String> = statement.column_names().map(str::to_owned).collect();
        let size =
            columns.iter().map(|name| Value::from(name.as_str()).to_string().len()).fold(0, usize::saturating_add);
        if size > MAX_ROWS / 2 {
            return failed("the names of the columns are too long");
        }
        answer(&mut statement, columns, size, given).map_err(error)?
    };
    if is_write {
        // SQLite itself asks for the number of pages of a new database.
        connection.authorizer(None::<fn(AuthContext<'_>) -> Authorization>).map_err(error)?;
        let bytes = connection.serialize(MAIN_DB).map_err(error)?;
        let head = bytes.get(..VERSIONS.start).unwrap_or_default();
        let versions = bytes.get(VERSIONS).unwrap_or_default();
        let rest = bytes.get(VERSIONS.end..).unwrap_or_default();
        workspace.write(&path, |file| {
            file.put(head)?;
            file.put(if has_wal { WITH_WAL } else { versions })?;
            file.put(rest)
        })?;
    }
    Ok(output)
}

/// Runs a statement. `size` is that of the names of its columns.
fn answer(
    statement: &mut Statement<'_>,
    columns: Vec<String>,
    mut size: usize,
    given: &[String],
) -> rusqlite::Result<String> {
    let parameters = params_from_iter(given.iter().map(|value| Parameter(value)));
    if columns.is_empty() {
        let changed = statement.execute(parameters)?;
        return Ok(json!({ "changed": changed }).to_string());
    }
    let (count, is_read) = (columns.len(), statement.readonly());
    let (mut all, mut is_cut) = (Vec::new(), false);
    let mut rows = statement.query(parameters)?;
    // A statement that changes something is run to its end.
    while let Some(row) = rows.next()?.filter(|_| !is_cut || !is_read) {
        if is_cut {
            continue;
        }
        let row = (0..count).map(|index| row.get_ref(index).map(json_value)).collect::<rusqlite::Result<Value>>()?;
        size = size.saturating_add(row.to_string().len());
        is_cut = size > MAX_ROWS;
        if !is_cut {
            all.push(row);
        }
    }
    Ok(json!({ "columns": columns, "rows": all, "truncated": is_cut }).to_string())
}

/// Returns a value as JSON. A blob is in hexadecimal digits.
fn json_value(value: ValueRef<'_>) -> Value {
    match value {
        ValueRef::Null => Value::Null,
        ValueRef::Integer(number) => number.into(),
        ValueRef::Real(number) => {
            serde_json::Number::from_f64(number).map_or_else(|| Value::from(number.to_string()), Value::Number)
        }
        ValueRef::Text(text) => String::from_utf8_lossy(shortened(text)).into(),
        ValueRef::Blob(bytes) => {
            json!({ "blob": shortened(bytes).iter().map(|byte| format!("{byte:02x}")).collect::<String>() })
        }
    }
}

/// Returns as much of a value as can be in an answer. What is longer does not fit in.
fn shortened(bytes: &[u8]) -> &[u8] {
    bytes.get(..MAX_ROWS.saturating_add(1)).unwrap_or(bytes)
}

fn beside(path: &WorkspacePath, end: &str) -> Result<WorkspacePath, VerbError> {
    WorkspacePath::parse(&format!("{path}{end}")).map_err(|error| VerbError::Denied(error.to_string()))
}

/// Checks that no program has a database open in a way that needs the file as it is, and that the file is one.
fn check_replaceable(path: &WorkspacePath, workspace: &Workspace) -> Result<(), VerbError> {
    for end in OF_OPEN {
        if workspace.stat(&beside(path, end)?)?.is_some() {
            return failed(format!("'{path}' cannot be changed while {path}{end} is there: a program has it open"));
        }
    }
    if workspace.stat(path)?.is_some_and(|stat| stat.st_size == 0) {
        return failed(format!("'{path}' is empty, and may be no database; delete it to create one"));
    }
    Ok(())
}

/// Returns whether a file beside a database holds a part of its content. The header of a journal that is done may be zeros.
fn holds_content(path: &WorkspacePath, workspace: &Workspace) -> Result<bool, VerbError> {
    let mut first = None;
    let read = workspace.read_pieces(path, |piece| {
        first = piece.first().copied();
        Ok(false)
    });
    match read {
        Err(VerbError::Missing(_)) => Ok(false),
        read => read.map(|()| first.is_some_and(|first| first != 0)),
    }
}

/// Opens a copy of the database in memory, which has no way to a file. The second value is whether the database has a log that is
/// written ahead.
fn open(path: &WorkspacePath, workspace: &Workspace, is_write: bool) -> Result<(Connection, bool), VerbError> {
    for end in COMPANIONS {
        if holds_content(&beside(path, end)?, workspace)? {
            return failed(format!(
                "'{path}' cannot be used while {path}{end} may hold a part of it; the program that has it open puts it in when it closes it"
            ));
        }
    }
    let mut bytes = Vec::new();
    let read = workspace.read_pieces(path, |piece| {
        bytes.extend_from_slice(piece);
        if bytes.len() > MAX_DATABASE {
            return failed(format!("'{path}' has more than {} MiB", MAX_DATABASE >> 20));
        }
        Ok(true)
    });
    match read {
        // The first statement creates it.
        Err(VerbError::Missing(_)) if is_write => {}
        read => read?,
    }
    if !bytes.is_empty() && !bytes.starts_with(MAGIC) {
        return failed(format!("'{path}' is no SQLite database"));
    }
    // There is no log to write ahead in memory. With none on disk either, the database is whole without it.
    let mut has_wal = false;
    if let Some(versions) = bytes.get_mut(VERSIONS).filter(|versions| *versions == WITH_WAL) {
        versions.copy_from_slice(WITHOUT_WAL);
        has_wal = true;
    }
    let opened = || -> rusqlite::Result<Connection> {
        let mut connection = Connection::open_in_memory()?;
        if !bytes.is_empty() {
            connection.deserialize_read_exact(MAIN_DB, bytes.as_slice(), bytes.len(), !is_write)?;
        }
        confine(&mut connection, workspace.until, is_write)?;
        Ok(connection)
    };
    opened().map(|connection| (connection, has_wal)).map_err(|error| sql_error(&error, workspace))
}

/// Limits what a statement can do, and what a database can make SQLite do.
fn confine(connection: &mut Connection, until: Instant, is_write: bool) -> rusqlite::Result<()> {
    for (option, value) in [
        (DbConfig::SQLITE_DBCONFIG_DEFENSIVE, true),
        (DbConfig::SQLITE_DBCONFIG_TRUSTED_SCHEMA, false),
        (DbConfig::SQLITE_DBCONFIG_ENABLE_FTS3_TOKENIZER, false),
        (DbConfig::SQLITE_DBCONFIG_WRITABLE_SCHEMA, false),
        (DbConfig::SQLITE_DBCONFIG_DQS_DDL, false),
        (DbConfig::SQLITE_DBCONFIG_DQS_DML, false),
    ] {
        connection.set_db_config(option, value)?;
    }
    for (limit, value) in [
        (Limit::SQLITE_LIMIT_LENGTH, MAX_VALUE),
        (Limit::SQLITE_LIMIT_SQL_LENGTH, MAX_STATEMENT),
        (Limit::SQLITE_LIMIT_COLUMN, 512),
        (Limit::SQLITE_LIMIT_EXPR_DEPTH, 200),
        (Limit::SQLITE_LIMIT_COMPOUND_SELECT, 100),
        (Limit::SQLITE_LIMIT_VDBE_OP, 250_000),
        (Limit::SQLITE_LIMIT_FUNCTION_ARG, 100),
        (Limit::SQLITE_LIMIT_ATTACHED, 0),
        (Limit::SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 1_000),
        (Limit::SQLITE_LIMIT_VARIABLE_NUMBER, 256),
        (Limit::SQLITE_LIMIT_TRIGGER_DEPTH, 16),
        (Limit::SQLITE_LIMIT_WORKER_THREADS, 0),
    ] {
        connection.set_limit(limit, value)?;
    }
    connection.pragma_update(None, "temp_store", "MEMORY")?;
    connection.pragma_update(None, "cell_size_check", true)?;
    connection.pragma_update(None, "hard_heap_limit", MAX_HEAP)?;
    let page: u32 = connection.pragma_query_value(None, "page_size", |row| row.get(0))?;
    let pages = u32::try_from(MAX_DATABASE).unwrap_or(u32::MAX).checked_div(page).unwrap_or(1);
    connection.pragma_update_and_check(None, "max_page_count", pages, |_| Ok(()))?;
    connection.progress_handler(STEPS, Some(move || Instant::now() >= until))?;
    connection.authorizer(Some(move |context: AuthContext<'_>| {
        if is_permitted(&context.action, is_write) { Authorization::Allow } else { Authorization::Deny }
    }))
}

/// Returns whether a statement may do this. Transactions are the caller's: a statement is one.
fn is_permitted(action: &AuthAction<'_>, is_write: bool) -> bool {
    match action {
        AuthAction::Select | AuthAction::Read { .. } | AuthAction::Recursive => true,
        // Virtual tables prepare such statements when they are read. A statement that changes something itself is refused as a whole.
        AuthAction::Delete { .. } | AuthAction::Insert { .. } | AuthAction::Update { .. } => true,
        AuthAction::Function { function_name } => !function_name.eq_ignore_ascii_case("load_extension"),
        AuthAction::Pragma { pragma_name, pragma_value } => {
            let name = pragma_name.to_ascii_lowercase();
            let is_state = matches!(name.as_str(), "data_version" | "encoding" | "user_version");
            PRAGMAS.contains(&name.as_str()) && !(is_state && pragma_value.is_some())
        }
        AuthAction::AlterTable { .. }
        | AuthAction::CreateIndex { .. }
        | AuthAction::CreateTable { .. }
        | AuthAction::CreateTrigger { .. }
        | AuthAction::CreateView { .. }
        | AuthAction::DropIndex { .. }
        | AuthAction::DropTrigger { .. }
        | AuthAction::DropView { .. }
        | AuthAction::Reindex { .. } => is_write,
        _ => false,
    }
}

fn sql_error(error: &rusqlite::Error, workspace: &Workspace) -> VerbError {
    if let Err(over) = workspace.check_time() {
        return over;
    }
    match error {
        rusqlite::Error::MultipleStatement => VerbError::Failed("a query is one statement".to_owned()),
        rusqlite::Error::SqliteFailure(ffi::Error { extended_code: ffi::SQLITE_AUTH, .. }, _) => {
            VerbError::Denied(NOT_PERMITTED.to_owned())
        }
        error => VerbError::Failed(format!("{ERROR}{error}")),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::time::Duration;

    use parking_lot::Mutex;

    use super::*;
    use crate::tool::primitives::sql::READ;

    /// SQLite's limit of the heap holds for a process, and the tests are threads of one.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

    /// Runs a statement on a database with one table, within a time, and returns the workspace too.
    fn ask(statement: &str, mode: &str, within: Duration) -> (tempfile::TempDir, Result<String, VerbError>) {
        let dir = tempfile::tempdir().unwrap();
        let connection = Connection::open(dir.path().join("a.db")).unwrap();
        connection.execute_batch("create table t (a); insert into t values (1); create index i on t (a)").unwrap();
        drop(connection);
        let mut workspace = Workspace::new(File::open(dir.path()).unwrap().into()).unwrap();
        workspace.until = Instant::now() + within;
        workspace.may_write.set(1 << 30);
        let args = ["a.db", statement, mode].map(str::to_owned);
        let answer = {
            let _one = ONE_AT_A_TIME.lock();
            run("query_sql", Args(&args), &workspace).unwrap()
        };
        (dir, answer)
    }

    #[test]
    fn a_statement_ends_with_its_time_and_within_its_memory() {
        let endless = "with recursive r(i) as (select 1 union all select i + 1 from r) select max(i) from r";
        let (_, answer) = ask(endless, READ, Duration::from_millis(100));
        assert_eq!(answer, Err(VerbError::TimedOut));
        let second = Duration::from_secs(60);
        let large = "with recursive r(i) as (select 1 union all select i + 1 from r limit 100) select group_concat(printf('%.*c', 1000000, 'x')) from r";
        let (_, answer) = ask(large, READ, second);
        assert_eq!(answer, Err(VerbError::Failed("SQLite: string or blob too big".to_owned())));
        let sorted = "with recursive r(i) as (select 1 union all select i + 1 from r limit 2000) select zeroblob(1000000 + i) from r order by i desc";
        let (_, answer) = ask(sorted, READ, second);
        assert_eq!(answer, Err(VerbError::Failed("SQLite: out of memory".to_owned())));
        // A database does not outgrow what can be read again, and keeps its content.
        // Rows that are not returned are not computed.
        let many = "with recursive r(i) as (select 1 union all select i + 1 from r) select i from r";
        let (_, answer) = ask(many, READ, second);
        assert!(answer.unwrap().ends_with("\"truncated\":true}"));
        let grows = "with recursive r(i) as (select 1 union all select i + 1 from r limit 100) insert into t select zeroblob(1000000) from r";
        let (dir, answer) = ask(grows, WRITE, second);
        assert_eq!(answer, Err(VerbError::Failed("SQLite: database or disk is full".to_owned())));
        assert!(fs::metadata(dir.path().join("a.db")).unwrap().len() < 100_000);
    }

    #[test]
    fn a_mode_permits_what_it_says() {
        let second = Duration::from_secs(60);
        for (statement, is_read) in [
            ("select * from t", true),
            ("explain query plan select * from t", true),
            ("values (1)", true),
            ("select * from pragma_index_list('t')", true),
            ("pragma table_info(t)", true),
            ("pragma user_version", true),
            ("insert into t values (2)", false),
            ("replace into t values (2)", false),
            ("update t set a = 3", false),
            ("delete from t", false),
            ("create table u (a)", false),
            ("create view v as select 1", false),
            ("create trigger g after insert on t begin delete from t; end", false),
            ("alter table t rename to u", false),
            ("drop index i", false),
            ("reindex", false),
        ] {
            let (_, answer) = ask(statement, READ, second);
            assert_eq!(answer.is_ok(), is_read, "{statement}: {answer:?}");
            let (_, answer) = ask(statement, WRITE, second);
            assert!(answer.is_ok(), "{statement}: {answer:?}");
        }
        for statement in [
            "attach 'b.db' as b",
            "detach main",
            "drop table t",
            "select * from t; select 1",
            "vacuum",
            "vacuum into 'b.db'",
            "begin",
            "commit",
            "savepoint s",
            "analyze",
            "create temp table u (a)",
            "create virtual table f using fts5(a)",
            "pragma journal_mode = wal",
            "pragma temp_store_directory = '/tmp'",
            "pragma user_version = 3",
            "pragma hard_heap_limit = 0",
            "pragma max_page_count = 0",
            "pragma writable_schema = on",
            "pragma wal_checkpoint",
            "pragma integrity_check",
            "pragma database_list",
            "insert into sqlite_master values (1, 2, 3, 4, 5)",
            "select load_extension('x')",
            "select fts3_tokenizer('x')",
        ] {
            for mode in [READ, WRITE] {
                let (dir, answer) = ask(statement, mode, second);
                assert!(answer.is_err(), "{statement}: {answer:?}");
                assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "{statement}");
            }
        }
    }

    #[test]
    fn virtual_tables_are_read() {
        let _one = ONE_AT_A_TIME.lock();
        for (create, query) in [
            (
                "create virtual table f using fts5(a); insert into f values ('hello world')",
                "select a from f where f match 'hello'",
            ),
            (
                "create virtual table f using fts4(a); insert into f values ('hello world')",
                "select a from f where f match 'hello'",
            ),
            (
                "create virtual table f using rtree(id, a, b); insert into f values (1, 2, 3)",
                "select id from f where a < 3",
            ),
        ] {
            let dir = tempfile::tempdir().unwrap();
            Connection::open(dir.path().join("a.db")).unwrap().execute_batch(create).unwrap();
            let mut workspace = Workspace::new(File::open(dir.path()).unwrap().into()).unwrap();
            workspace.until = Instant::now() + Duration::from_secs(60);
            for mode in [READ, WRITE] {
                let args = ["a.db", query, mode].map(str::to_owned);
                let answer = run("query_sql", Args(&args), &workspace).unwrap().unwrap();
                assert!(answer.contains("[[1]]") || answer.contains("hello world"), "{answer}");
            }
        }
    }

    #[test]
    fn an_answer_is_checked_before_a_change_is_kept() {
        let second = Duration::from_secs(60);
        let names: Vec<String> = (0..4).map(|n| format!("a as \"{}\"", format!("{n}").repeat(20_000))).collect();
        let (dir, answer) = ask(&format!("insert into t values (2) returning {}", names.join(", ")), WRITE, second);
        assert!(answer.is_err(), "{answer:?}");
        let connection = Connection::open(dir.path().join("a.db")).unwrap();
        assert_eq!(connection.query_row("select count(*) from t", [], |row| row.get::<_, i64>(0)), Ok(1));
        let before = fs::read(dir.path().join("a.db")).unwrap();
        let (dir, answer) = ask("explain insert into t values (2)", WRITE, second);
        assert!(answer.is_ok() && fs::read(dir.path().join("a.db")).unwrap() == before, "{answer:?}");
    }

    #[test]
    fn a_damaged_database_is_an_error() {
        let (dir, _) = ask("select 1", READ, Duration::from_secs(60));
        let _one = ONE_AT_A_TIME.lock();
        let whole = fs::read(dir.path().join("a.db")).unwrap();
        let mut workspace = Workspace::new(File::open(dir.path()).unwrap().into()).unwrap();
        workspace.until = Instant::now() + Duration::from_secs(60);
        let args = ["a.db", "select * from t order by a", READ].map(str::to_owned);
        let mut changed = 0;
        for at in (0..whole.len()).step_by(37) {
            for bytes in [whole[..at].to_vec(), {
                let mut bytes = whole.clone();
                bytes[at] ^= 0xff;
                bytes
            }] {
                fs::write(dir.path().join("a.db"), bytes).unwrap();
                let answer = run("query_sql", Args(&args), &workspace).unwrap();
                changed += usize::from(answer.is_err());
            }
        }
        assert!(changed > 100, "{changed}");
    }
}
