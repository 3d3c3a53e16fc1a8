//! docs/protocol.md numbers every message as the wire does.

/// The variants of an enum in the order of its definition.
fn variants(source: &str, name: &str) -> Vec<String> {
    let body = source.split(&format!("pub enum {name} {{\n")).nth(1).unwrap();
    let body = body.split("\n}\n").next().unwrap();
    let top =
        |line: &&str| line.starts_with("    ") && line[4..].starts_with(|c: char| c.is_ascii_uppercase());
    let name = |line: &str| line[4..].chars().take_while(|c| c.is_alphanumeric()).collect();
    body.lines().filter(top).map(name).collect()
}

/// The second column of a table's rows that begin with a number, which has to count up from 0.
fn documented(text: &str, heading: &str) -> Vec<String> {
    let part = text.split(heading).nth(1).unwrap();
    let rows = part.lines().skip_while(|l| !l.starts_with("| 0 |")).take_while(|l| l.starts_with('|'));
    let row = |(i, line): (usize, &str)| {
        let mut cells = line.split('|').map(str::trim).skip(1);
        assert_eq!(cells.next(), Some(i.to_string().as_str()), "{line}");
        cells.next().unwrap().to_string()
    };
    rows.enumerate().map(row).collect()
}

#[test]
fn documented_numbers_are_the_wires() {
    let source = include_str!("../../src/cluster/message.rs");
    let text = include_str!("../../docs/protocol.md");
    assert_eq!(documented(text, "Worker to coordinator:"), variants(source, "ToCoordinator"));
    assert_eq!(documented(text, "Coordinator to worker:"), variants(source, "ToWorker"));
    assert_eq!(variants(source, "Bye"), ["Done", "Later", "Halted", "Refused", "Out"]);
    assert_eq!(variants(source, "Work"), ["Train", "Recheck", "Eval", "Prompt"]);
    assert_eq!(variants(source, "Trouble"), ["Device", "Value"]);
    assert_eq!(variants(source, "Packed"), ["Fixed", "Single"]);
}
