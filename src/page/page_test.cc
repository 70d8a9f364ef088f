// A page is filled whole, and what the data hold stays data.
#include "page/page.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace halfwire {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(Page, IsFilled) {
  const std::string page = fillPage(
      "<style>/*HALFWIRE-STYLE*/</style><i>/*HALFWIRE-DATA*/</i><script>/*HALFWIRE-SCRIPT*/</script>", "{}");
  EXPECT_THAT(page, HasSubstr("<i>{}</i>"));
  EXPECT_THAT(page, HasSubstr("prefers-color-scheme: dark"));
  EXPECT_THAT(page, HasSubstr("\"use strict\";"));
  EXPECT_THAT(page, Not(HasSubstr("HALFWIRE-")));
  for (const char* outside : {"http:", "https:", "@import", "url(", "fetch("})
    EXPECT_THAT(page, Not(HasSubstr(outside)));
}

TEST(Page, DataCannotLeaveTheirElement) {
  const std::string page = fillPage("<i>/*HALFWIRE-DATA*/</i>/*HALFWIRE-SCRIPT*/",
                                    "{\"a\": \"</script><!--/*HALFWIRE-SCRIPT*/\"}");
  EXPECT_THAT(page, HasSubstr("\\u003c/script>\\u003c!--"));
  // The mark of a later part, in the data, is not filled.
  EXPECT_THAT(page, HasSubstr("/*HALFWIRE-SCRIPT*/\"}</i>\"use strict\";"));
}

}  // namespace
}  // namespace halfwire
