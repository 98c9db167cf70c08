//! Finds the line of each problem in the configuration file.

use toml::de::{DeTable, DeValue};

use super::reader::Problem;

/// Sets the line of each problem whose path is in the text, or of the innermost table or list that is. Problems that
/// have a line keep it.
pub fn locate(text: &str, problems: &mut [Problem]) {
    if problems.iter().all(|problem| problem.line.is_some()) {
        return;
    }
    let Ok(table) = DeTable::parse(text) else { return };
    for problem in problems.iter_mut().filter(|problem| problem.line.is_none()) {
        let offset = offset_in_table(table.get_ref(), &problem.path);
        problem.line = offset.and_then(|offset| line_at(text, offset));
    }
}

/// Returns the number of the line that contains this byte, from 1.
pub(super) fn line_at(text: &str, offset: usize) -> Option<usize> {
    let before = text.as_bytes().get(..offset)?;
    Some(before.iter().filter(|byte| **byte == b'\n').count().saturating_add(1))
}

/// Returns where the value at a path begins. Of two keys that the path could begin with, such as `a` and `a.b`, the
/// longer one is meant.
fn offset_in_table(table: &DeTable<'_>, path: &str) -> Option<usize> {
    let entries = table.iter().filter_map(|(key, value)| {
        let (plain, quoted) = (key.get_ref().as_ref(), format!("{:?}", key.get_ref()));
        let rest = path.strip_prefix(plain).or_else(|| path.strip_prefix(quoted.as_str()))?;
        (rest.is_empty() || rest.starts_with(['.', '['])).then_some((rest, key, value))
    });
    let (rest, key, value) = entries.min_by_key(|(rest, ..)| rest.len())?;
    let inner = match value.get_ref() {
        DeValue::Table(table) => offset_in_table(table, rest.strip_prefix('.').unwrap_or_default()),
        DeValue::Array(_) => offset_in_list(value.get_ref(), rest),
        _ => None,
    };
    inner.or_else(|| Some(key.span().start))
}

fn offset_in_list(list: &DeValue<'_>, path: &str) -> Option<usize> {
    let (index, rest) = path.strip_prefix('[')?.split_once(']')?;
    let item = list.get(index.parse::<usize>().ok()?)?;
    let inner = match item.get_ref() {
        DeValue::Table(table) => offset_in_table(table, rest.strip_prefix('.').unwrap_or_default()),
        _ => None,
    };
    inner.or_else(|| Some(item.span().start))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_problem_has_the_line_of_its_key_or_of_what_contains_it() {
        let text = "state_dir = \"x\"\n\n[tasks.t]\nplan = \"p\"\nintegrations = [\n  \"a\",\n  \"b\",\n]\n\
                    [dns.hosts]\n\"x.test\" = [\"10.0.0.1\"]\n[\"tasks\".\"u.v\"]\nplan = \"q\"\n\
                    [[proxy.listeners]]\nlisten = \"a\"\n[[proxy.listeners]]\nlisten = \"b\"\ninline = { a = 1 }\n";
        let rows = [
            ("state_dir", Some(1)),
            ("tasks.t", Some(3)),
            ("tasks.t.plan", Some(4)),
            ("tasks.t.token", Some(3)),
            ("tasks.t.integrations", Some(5)),
            ("tasks.t.integrations[1]", Some(7)),
            ("tasks.t.integrations[9]", Some(5)),
            ("dns.hosts.\"x.test\"", Some(10)),
            ("dns.hosts.\"x.test\"[0]", Some(10)),
            ("tasks.u.v.plan", Some(12)),
            ("proxy.listeners[1].listen", Some(16)),
            ("proxy.listeners[1].inline.a", Some(17)),
            ("vault.key", None),
            ("tasksx", None),
            ("", None),
        ];
        for (path, want) in rows {
            let mut problems = [Problem::new(path, "", "")];
            locate(text, &mut problems);
            assert_eq!(problems[0].line, want, "{path}");
        }
    }

    #[test]
    fn odd_paths_and_a_file_that_is_no_toml_are_survived() {
        let rows = [
            ("\na = ", "a", None),
            ("\na = 1", "a[0]b", Some(2)),
            ("\n\na = [1]", "a[18446744073709551616]", Some(3)),
            ("\na = [1]", "b[0]", None),
            ("", "[", None),
        ];
        for (text, path, want) in rows {
            let mut problems = [Problem::new(path, "", "")];
            locate(text, &mut problems);
            assert_eq!(problems[0].line, want, "{text:?} {path}");
        }
    }
}
