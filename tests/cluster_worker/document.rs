//! docs/explain/protocol.md numbers every message and lists every field with its type, as on the wire.

/// The variants of an enum in the order of its definition.
fn variants(source: &str, name: &str) -> Vec<String> {
    let body = source.split(&format!("pub enum {name} {{\n")).nth(1).unwrap();
    let body = body.split("\n}\n").next().unwrap();
    let top =
        |line: &&str| line.starts_with("    ") && line[4..].starts_with(|c: char| c.is_ascii_uppercase());
    let name = |line: &str| line[4..].chars().take_while(|c| c.is_alphanumeric()).collect();
    body.lines().filter(top).map(name).collect()
}

/// The second column of the rows of a table whose first column counts up from 0.
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
fn documented_numbers_match_the_wire() {
    let source = concat!(
        include_str!("../../src/cluster/message.rs"),
        include_str!("../../src/cluster/message/work.rs")
    );
    let text = include_str!("../../docs/explain/protocol.md");
    assert_eq!(documented(text, "Worker to coordinator:"), variants(source, "ToCoordinator"));
    assert_eq!(documented(text, "Coordinator to worker:"), variants(source, "ToWorker"));
    assert_eq!(variants(source, "Bye"), ["Done", "Later", "Halted", "Refused", "Out"]);
    assert_eq!(
        variants(source, "Work"),
        [
            "Train",
            "Recheck",
            "Eval",
            "Prompt",
            "Verify",
            "Predict",
            "Island",
            "RecheckIsland",
            "VerifyIsland"
        ]
    );
    assert_eq!(variants(source, "Trouble"), ["Device", "Value"]);
    assert_eq!(variants(source, "Packed"), ["Fixed", "Single"]);
    assert_eq!(variants(source, "Changed"), ["Added", "Bits"]);
}

/// The body of a declaration.
fn body<'a>(source: &'a str, what: &str) -> &'a str {
    let from = source.split(&format!("pub {what} {{\n")).nth(1).unwrap_or_else(|| panic!("no {what}"));
    from.split("\n}\n").next().unwrap()
}

/// `name: Type` of every line with that indentation.
fn fields(body: &str, indent: usize) -> String {
    let field = |line: &str| {
        let line = line.strip_prefix(&" ".repeat(indent))?.strip_suffix(',')?;
        let line = line.strip_prefix("pub ").unwrap_or(line);
        let name = line.split_once(": ")?.0;
        name.chars().all(|c| c.is_alphanumeric() || c == '_').then(|| line.to_string())
    };
    body.lines().filter_map(field).collect::<Vec<_>>().join(", ")
}

fn structure(source: &str, name: &str) -> String {
    format!("{name} {{ {} }}", fields(body(source, &format!("struct {name}")), 4))
}

fn enumeration(source: &str, name: &str) -> Vec<String> {
    let body = body(source, &format!("enum {name}"));
    let one = |variant: String| {
        let begins = |line: &&str| {
            let rest = line.strip_prefix("    ").and_then(|line| line.strip_prefix(variant.as_str()));
            rest.is_some_and(|rest| rest.starts_with([' ', '(', ',']))
        };
        let from = body.lines().position(|line| begins(&line)).unwrap();
        let first = body.lines().nth(from).unwrap().trim().trim_end_matches(',');
        if first.ends_with('{') {
            let lines: Vec<&str> = body.lines().skip(from + 1).take_while(|line| *line != "    },").collect();
            return format!("{name}::{variant} {{ {} }}", fields(&lines.join("\n"), 8));
        }
        format!("{name}::{}", first.replace("#[serde(with = \"in_place\")] ", ""))
    };
    variants(source, name).into_iter().map(one).collect()
}

/// The types on the wire, line by line, as in the section `Every field`.
fn declared() -> Vec<String> {
    let message = concat!(
        include_str!("../../src/cluster/message.rs"),
        include_str!("../../src/cluster/message/places.rs"),
        include_str!("../../src/cluster/message/work.rs")
    );
    let stage = include_str!("../../src/model/stage.rs");
    let enums = ["ToCoordinator", "ToWorker", "Work", "Packed", "Changed", "Trouble", "Bye"];
    let mut all: Vec<String> = enums.iter().flat_map(|name| enumeration(message, name)).collect();
    all.extend(enumeration(stage, "Targets"));
    let preference = include_str!("../../src/model/preference/mod.rs");
    let losses = include_str!("../../src/model/preference/loss.rs");
    all.extend(enumeration(preference, "Aim"));
    all.extend(enumeration(losses, "Loss"));
    all.extend(enumeration(include_str!("../../src/model/wire.rs"), "Wire"));
    let island = include_str!("../../src/train/island.rs");
    let structs = [
        (message, "Hello"),
        (message, "Manifest"),
        (message, "Capacity"),
        (message, "Needs"),
        (message, "SeatPlan"),
        (message, "RelayPlan"),
        (message, "ModelFile"),
        (message, "Device"),
        (message, "Lease"),
        (island, "Island"),
        (island, "InnerStep"),
        (include_str!("../../src/train/optim.rs"), "Options"),
        (stage, "Microbatch"),
        (stage, "LossSums"),
        (preference, "Answers"),
        (preference, "Lesson"),
        (losses, "Objective"),
        (include_str!("../../src/model/preference/ranking.rs"), "Ranking"),
        (preference, "Rewards"),
        (include_str!("../../src/train/sum.rs"), "RewardSums"),
        (stage, "Sampling"),
        (include_str!("../../src/model/lora.rs"), "LoraSpec"),
        (include_str!("../../src/model/lora.rs"), "Exception"),
        (include_str!("../../src/model/lora.rs"), "Numbers"),
        (include_str!("../../src/model/lora.rs"), "Ends"),
        (include_str!("../../src/model/lora.rs"), "TrainedRows"),
        (include_str!("../../src/train/trial.rs"), "Trials"),
        (include_str!("../../src/model/memory_fit.rs"), "Used"),
        (include_str!("../../kernels/src/numeric/line.rs"), "Points"),
        (include_str!("../../src/train/event.rs"), "Link"),
        (include_str!("../../kernels/src/backend/traffic.rs"), "Traffic"),
    ];
    all.extend(structs.iter().map(|(source, name)| structure(source, name)));
    all
}

#[test]
fn documented_fields_match_the_wire() {
    let text = include_str!("../../docs/explain/protocol.md");
    let section = text.split("### Every field").nth(1).unwrap();
    let block = section.split("```\n").nth(1).unwrap();
    let documented: Vec<&str> = block.lines().collect();
    assert_eq!(documented, declared());
}
