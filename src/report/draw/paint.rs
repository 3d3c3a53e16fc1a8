//! Colours and strokes of a picture in a separate file. Programs other than browsers have no CSS variables (librsvg,
//! ImageMagick) or ignore style sheets, so each element has its light colours as presentation attributes. The
//! attributes are computed from the page's style sheets: a picture looks the same in a file and on the page. Rules
//! apply in the order of `shapes.css`, which is their cascade there.

use std::collections::BTreeMap;

const COLOURS: &str = include_str!("../page/colours.css");
const SHAPES: &str = include_str!("../page/shapes.css");

/// The media query of [`COLOURS`] for dark viewers, and the style sheet of a file for them.
const DARK: &str = "@media (prefers-color-scheme:dark){";

/// The style sheet of a file: only rules for dark viewers, because the attributes hold the light colours.
pub fn style() -> String {
    let dark = COLOURS.find(DARK).map_or("", |at| &COLOURS[at..]);
    format!("{dark}{DARK}{SHAPES}}}")
}

/// Adds presentation attributes after every class in `body`. Text is escaped, so quotes enclose attributes alone.
pub fn painted(body: &str) -> String {
    let paint = Paint::new();
    let mut pieces = body.split(" class=\"");
    let mut out = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        let tag = out.rsplit('<').next().unwrap_or_default();
        let (classes, rest) = piece.split_once('"').unwrap_or((piece, ""));
        let attributes = paint.attributes(tag, classes);
        out += &format!(" class=\"{classes}\"{attributes}{rest}");
    }
    out
}

/// The attributes of the `svg` element.
pub fn root() -> String {
    Paint::new().attributes("svg", "")
}

/// The rules of [`SHAPES`], with light colours inserted.
struct Paint {
    /// The last part of a selector (`text`, `.grid`), and properties with their values.
    rules: Vec<(&'static str, Vec<(&'static str, String)>)>,
}

impl Paint {
    fn new() -> Self {
        let light = COLOURS.split(DARK).next().unwrap_or_default();
        let colours: BTreeMap<&str, &str> = rules(light).flat_map(|(_, all)| all).collect();
        let literal = |value: &str| match value.strip_prefix("var(").and_then(|v| v.strip_suffix(')')) {
            Some(name) => colours.get(name).copied().unwrap_or_default().to_owned(),
            None => value.to_owned(),
        };
        let rule = |(selector, all): (&'static str, Vec<(&'static str, &'static str)>)| {
            let last = selector.rsplit(' ').next().unwrap_or(selector);
            (last, all.into_iter().map(|(name, value)| (name, literal(value))).collect())
        };
        Paint { rules: rules(SHAPES).map(rule).collect() }
    }

    /// The attributes of one element: ` fill="none" stroke="#2a78d6"`
    fn attributes(&self, tag: &str, classes: &str) -> String {
        let applies = |selector: &str| match selector.strip_prefix('.') {
            Some(class) => classes.split(' ').any(|own| own == class),
            None => selector == tag,
        };
        let matching = self.rules.iter().filter(|(selector, _)| applies(selector));
        let all: BTreeMap<&str, &str> =
            matching.flat_map(|(_, all)| all).map(|(name, value)| (*name, value.as_str())).collect();
        all.iter().map(|(name, value)| format!(" {name}=\"{value}\"")).collect()
    }
}

/// Selector and declarations of every rule; `css` has no nested rules and no comments.
fn rules(css: &'static str) -> impl Iterator<Item = (&'static str, Vec<(&'static str, &'static str)>)> {
    css.split('}').filter_map(|rule| {
        let (selector, body) = rule.split_once('{')?;
        Some((selector.trim(), body.split(';').filter_map(|one| one.split_once(':')).collect()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_become_presentation_attributes() {
        let body = r#"<line class="curve s0 faint" x1="1"/><text class="heading">a &quot;b&quot;</text><text class="label">c</text>"#;
        let want = [
            r##"<line class="curve s0 faint" fill="none" opacity=".32" stroke="#2a78d6" stroke-linecap="round" stroke-linejoin="round" stroke-width="1.2" x1="1"/>"##,
            r##"<text class="heading" fill="#16181d" font-size="13px" font-weight="600">a &quot;b&quot;</text>"##,
            r##"<text class="label" fill="#686d76" font-size="11px">c</text>"##,
        ];
        assert_eq!(painted(body), want.concat());
        assert!(root().starts_with(" font-family=\"system-ui,"), "{}", root());
        assert!(!painted(body).contains("var("));
    }

    #[test]
    fn style_sheet_has_rules_for_dark_viewers_only() {
        let style = style();
        assert!(style.starts_with(DARK), "{style}");
        assert_eq!(style.matches(DARK).count(), 2, "colours, and what they paint");
        assert_eq!(style.matches('{').count(), style.matches('}').count(), "{style}");
    }
}
